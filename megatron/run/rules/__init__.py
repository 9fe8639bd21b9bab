"""Rules about flags of several rooms, one file a theme. A rule is found by standing here."""
