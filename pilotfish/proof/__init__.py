"""What `pilotfish verify` does: proof, on the user's own models, that drafting does not change the text."""
