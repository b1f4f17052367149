"""One link to every trusted device, and the handlers of its messages."""
