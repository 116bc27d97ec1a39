"""Names of image files, and of the file that names the image folders of several sources."""

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif"),
)
HEIF_SUFFIXES = (".heic", ".heif", ".hif")  # photos of phones
CONVERT_HEIF = "convert .heic and .heif to JPEG, because Pillow cannot read them"
IMAGE_FOLDERS_FILE = "sources.json"  # folders by source, instead of one image folder
