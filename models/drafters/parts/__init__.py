"""What drafters that contain another one share: its settings, its construction, its drafts."""
