"""one link to every trusted device."""
