// A queue in one piece of memory that grows and never shrinks: no allocation for what passes through.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace kbtp {

template <class T>
class Fifo {
  public:
    bool empty() const { return size_ == 0; }
    std::size_t size() const { return size_; }
    T& operator[](std::size_t i) { return slots_[(first_ + i) & (slots_.size() - 1)]; }
    const T& operator[](std::size_t i) const { return slots_[(first_ + i) & (slots_.size() - 1)]; }
    T& front() { return slots_[first_]; }

    void push_back(T&& value) {
        if (size_ == slots_.size()) grow();
        (*this)[size_++] = std::move(value);
    }
    void pop_front() {
        slots_[first_] = T{};  // what it holds is let go now
        first_ = (first_ + 1) & (slots_.size() - 1);
        --size_;
    }
    T take_front() {
        T value = std::move(slots_[first_]);
        first_ = (first_ + 1) & (slots_.size() - 1);
        --size_;
        return value;
    }
    void erase(std::size_t i) {
        for (; i + 1 < size_; ++i) (*this)[i] = std::move((*this)[i + 1]);
        (*this)[--size_] = T{};
    }
    void clear() {
        while (!empty()) pop_front();
    }

  private:
    void grow() {
        std::vector<T> larger(slots_.empty() ? 16 : 2 * slots_.size());  // always a power of two
        for (std::size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
        slots_.swap(larger);
        first_ = 0;
    }

    std::vector<T> slots_;
    std::size_t first_ = 0, size_ = 0;
};

}  // namespace kbtp
