"""the device with the data: drives one job."""
