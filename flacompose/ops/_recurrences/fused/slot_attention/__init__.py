"""One token of gated slot attention: two passes of channel decay, with a softmax between them."""
