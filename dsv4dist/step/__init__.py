"""What all layers share during one step, derived from the step packet."""
