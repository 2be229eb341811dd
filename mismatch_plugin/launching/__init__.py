"""What the launcher knows of each host: how its script is recognised, and how its command line takes the settings."""
