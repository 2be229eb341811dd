"""What people read: tables as data, rendered for a terminal or as markdown."""
