"""Support for every vision-language model that transformers loads as `AutoModelForImageTextToText`."""
