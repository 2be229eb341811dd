"""Responses: one form of them, the files and replies they come from, and the packed batch they become."""
