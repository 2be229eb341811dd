"""What the settings do: a worked example, and numbers of one's own, token by token."""
