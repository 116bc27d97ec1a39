"""Any vision-language model that transformers loads as `AutoModelForImageTextToText`."""
