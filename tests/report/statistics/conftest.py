import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for simulated_studies.py and page_tables.py
