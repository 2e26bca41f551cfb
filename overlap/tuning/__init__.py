"""What measures: `autotune`, the search behind it, and the tables it writes. It calls the operations themselves."""
