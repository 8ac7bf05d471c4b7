"""What public functions do with their arguments before an operator gets them."""
