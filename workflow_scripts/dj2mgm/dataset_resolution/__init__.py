"""Recognition of datasets: files, folders, known data of the hub."""
