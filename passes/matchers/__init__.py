"""One file per family of attention; each finds its anchors and reads their arguments."""
