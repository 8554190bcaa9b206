"""Sources of images: folders, zip archives, arrays, Hugging Face datasets, and the labels of each."""
