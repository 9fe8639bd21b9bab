"""The compute-heavy operations behind one interface, with a folder for each kind of device."""
