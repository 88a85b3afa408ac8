"""The attention layer and its parts, as one device sees them."""
