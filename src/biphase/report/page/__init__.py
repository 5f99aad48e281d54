"""The page: one self-contained HTML file with the report, its data and its scripts; it loads nothing from a network."""
