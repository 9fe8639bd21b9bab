"""The compute-heavy operations behind one face: a folder for each kind of device."""
