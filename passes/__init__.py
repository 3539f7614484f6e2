"""Graph passes: rewrites of one rank's program. Imported as `spmd.passes`."""
