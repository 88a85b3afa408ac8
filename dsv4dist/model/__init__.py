"""What is not attention, and the model as a whole."""
