"""Operations of the catalog."""
