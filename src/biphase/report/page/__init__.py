"""The page: one HTML file that holds the report, its data and its scripts, and asks nothing of any network."""
