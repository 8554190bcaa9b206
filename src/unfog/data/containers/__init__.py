"""Arrays in containers of scientific data: HDF5, NetCDF and Zarr."""
