"""Files of scientists: TIFF, NIfTI, DICOM and FITS, each read through the library of its field."""
