"""The tuning database: records in SQLite, shipped packs of JSON lines, and the run-time lookup."""
