"""What is written about a run; renders, decides nothing."""
