"""Searches over HTTP: a page and a JSON interface to one model and one gallery."""
