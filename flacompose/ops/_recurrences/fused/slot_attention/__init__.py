"""One token of gated slot attention: two passes of vector decay, with a softmax between them."""
