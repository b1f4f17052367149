"""Who is here: identity, pairing, discovery, membership, election."""
