"""Loss, optimizer, step and the loop around them."""
