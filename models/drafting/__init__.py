"""What drafters share: base classes, layers, vocabulary, first weights, look-ups."""
