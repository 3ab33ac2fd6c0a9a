"""Other programs: engines that search galleries, formats of models and galleries, and servers."""
