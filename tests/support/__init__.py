"""What tests compare against: oracles that share no code with the package beyond its configuration records."""
