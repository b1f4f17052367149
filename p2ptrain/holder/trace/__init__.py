"""What all devices of a job did when, as one file for Perfetto."""
