"""The report: what a run, several runs or a sweep wrote, as one HTML page or as pictures."""
