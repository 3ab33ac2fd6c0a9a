"""Search beside the exact one: graphs, other programs, and galleries written for them."""
