"""The papers' tables: published scores, the commands of their rows, and comparison with runs."""
