"""`raydist bench`: what is measured (`registry`, `rows`) and how (`run`, `command`), how it is judged, shown and checked."""
