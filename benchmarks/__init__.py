"""Speed and memory of hypjax on this machine, compared with other libraries."""
