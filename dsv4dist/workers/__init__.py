"""The ranks: how a step reaches them, how they run it, and how they are started and watched."""
