"""The text that the embedded tiny target lives on: an invented world and its grammar."""
