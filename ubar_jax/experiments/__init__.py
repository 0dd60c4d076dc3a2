"""Command-line programs: thin mains on absl flags."""
