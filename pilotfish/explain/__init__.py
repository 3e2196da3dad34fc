"""`pilotfish explain`: the method made visible, pass by pass, in the terminal and as a page."""
