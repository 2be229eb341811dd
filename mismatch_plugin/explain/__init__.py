"""What the settings do: a worked example under any flags, token by token."""
