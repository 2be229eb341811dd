"""One adapter for each host. Importing one imports its host only when a function of it runs."""
