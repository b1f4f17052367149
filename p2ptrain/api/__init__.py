"""What apps embed: Node, Run, train; composes the three roles."""
