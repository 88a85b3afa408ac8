"""Operations on plain tensors and paged caches; nothing here knows a layer, a request or an option."""
