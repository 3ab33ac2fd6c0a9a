"""Embedded images with names: their files, and the galleries that search them."""
