"""Rollouts as trainers and engines save them, read into `Dump`. One file a family; `registry` lists them."""
